"""`plan`: what a conversion would save, need and lose, before it is done."""
