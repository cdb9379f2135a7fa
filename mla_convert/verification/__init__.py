"""`verify`: a written folder against its source, check by check."""
