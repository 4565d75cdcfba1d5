"""Where a checkpoint comes from: read from the records, verified on disk, shown as text and picture."""
