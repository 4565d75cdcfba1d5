"""Charts and graphs as SVG text, without a drawing library: cheap enough for a training that runs."""
