"""Backend `trl`: TRL's trainers, on one machine or several nodes."""
