"""The MLA layer, its absorbed form, and its tensors in the stock (DeepSeek-V3) and the native format."""
