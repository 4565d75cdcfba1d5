"""Container images: built, imported as .sqsh, task images as .sif; each verified and recorded, only when asked for."""
