"""Programs that load exports in environments of other libraries; each imports nothing of ours."""
