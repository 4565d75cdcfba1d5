"""A stage with the site and the Python for its training: the subject of checks."""

import sys
from dataclasses import dataclass, field
from typing import Any, Self

from scripts.finding import Finding
from scripts.recipe.site import Site
from scripts.stage.stage import Stage


@dataclass(frozen=True)
class Candidate:
    """A stage, the site, and the Python of the training.

    `site` is None where a preflight is run by hand without a site. A preflight's checks write measured facts for
    preflight.json into `noted`, and see earlier findings in `found`.
    """

    stage: Stage
    site: Site | None = None
    python: str = sys.executable
    noted: dict[str, Any] = field(default_factory=dict)
    found: list[Finding] = field(default_factory=list)

    @classmethod
    def on(cls, site: Site, stage: Stage) -> Self:
        """Return the stage on a site, with the site's Python for the stage."""
        return cls(stage, site, stage.settings.python_on(site.vllm_python))

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name

    def stops(self, message: str, trap: int | None = None) -> Finding:
        """Return a finding that stops the stage."""
        return Finding(message, self.name, trap=trap)

    def warns(self, message: str, trap: int | None = None) -> Finding:
        """Return a warning of the stage."""
        return Finding(message, self.name, stops=False, trap=trap)
