"""What a checkpoint is and holds: files, config, families, the projections of a layer; what is not known is refused."""
