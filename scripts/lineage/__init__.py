"""Where a checkpoint comes from: read from the records, verified on disk, shown as text, picture and W3C PROV."""
