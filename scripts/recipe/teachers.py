"""The teachers of a distillation: every environment of the blend has a role of `teachers`, and every role teaches."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from scripts.recipe.environment import EnvironmentName
from scripts.recipe.strict import Name, Strict, invalid, refuse_misnamed

if TYPE_CHECKING:
    from scripts.recipe.recipe import Recipe


class Teaching(Strict):
    """Which teacher teaches a row, by the row's environment (multi-teacher on-policy distillation, MOPD)."""

    of: dict[EnvironmentName, Name] = Field({})
    """The role of `teachers` by environment."""
    default: Name | None = None
    """The role for all other environments; none: only a sole teacher teaches what `of` does not name."""

    def role_of(self, environment: str, roles: Iterable[str]) -> str | None:
        """Return the role among `roles` that teaches an environment's rows; None: no role does."""
        return self.of.get(environment) or self.default_among(roles)

    def default_among(self, roles: Iterable[str]) -> str | None:
        """Return the role of environments that `of` does not name: as stated, or a sole teacher's; None without one."""
        sole = [*roles]
        return self.default or (sole[0] if not self.of and len(sole) == 1 else None)

    def check_in(self, recipe: "Recipe", name: str) -> None:
        """Raise PydanticCustomError for an environment without a teacher, or a teacher without an environment."""
        stage, at = recipe.stages[name], f"stages.{name}.distillation"
        blend, roles = recipe.blends[stage.blend], stage.teachers
        if not roles:
            raise invalid("is empty; name a stage by role, as {teacher: rlhf}", f"stages.{name}.teachers")
        for key, role in {**{f"of.{each}": role for each, role in self.of.items()}, "default": self.default}.items():
            refuse_misnamed(f"{at}.{key}", "teacher", role, roles)
        for environment in self.of:
            refuse_misnamed(f"{at}.of.{environment}", "environment", environment, blend.environments)
        taught = {environment: self.role_of(environment, roles) for environment in blend.environments}
        if untaught := [environment for environment, role in taught.items() if role is None]:
            raise invalid(
                f"no teacher covers {', '.join(untaught)} of blend {stage.blend}; name one of {', '.join(roles)} for "
                "each, or a default",
                f"{at}.of",
            )
        if idle := [role for role in roles if role not in taught.values()]:
            says = f"teaches no environment of blend {stage.blend}; name it in distillation.of, or leave it out"
            raise invalid(says, f"stages.{name}.teachers.{idle[0]}")
