"""One source layer to one latent layer (rope, factor, assemble), the choice of sizes, and the pipeline of `convert`."""
