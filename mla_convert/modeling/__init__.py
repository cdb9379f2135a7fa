"""The native format: every family's own model classes with latent attention (configs.py makes them known)."""
