"""Merges of exports: stages that train nothing, of which a recipe speaks as of backend `trl`."""
