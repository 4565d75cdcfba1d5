"""What speaks to Snakemake in the process of the call: its console, locks, staleness, retries and alerts."""
