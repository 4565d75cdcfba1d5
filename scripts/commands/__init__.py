"""The command `stagecoach`: what people type, one module a subcommand."""
