"""The native format: every family's own model classes with latent attention (classes.register makes them known)."""
