"""The command `stagecoach`, a module a subcommand."""
