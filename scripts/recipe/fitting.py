"""Refuse the parts of a recipe that do not fit together: generated blends, and held-out scores."""

from scripts.recipe.graph import Graph
from scripts.recipe.strict import invalid, refuse_misnamed

FEW_TOKENS = 512
"""What a recipe is advised to let held-out responses take, where its stages do not tell."""


def without_scores(graph: Graph) -> str | None:
    """Return why a recipe needs held-out scores, with the lines that ask for them; None where it needs none.

    Stages that learn from written answers have the loss on their held-out rows. Stages of backend trl that sample their
    own responses have only rewards, which held-out prompts measure. NeMo-RL validates its stages itself.
    """
    sampling = [name for name, stage in graph.stages.items() if stage.kind == "prompts"]
    if not sampling or any(stage.is_converted for stage in graph.stages.values()):
        return None
    policy = getattr(graph.stages[sampling[0]], "policy", None)
    generation = getattr(policy, "generation", None)
    tokens = generation.max_new_tokens if generation else FEW_TOKENS
    return (
        f"{', '.join(sampling)} would be judged by nothing held out; responses to the held-out prompts judge it by\n"
        f"evaluation:\n  max_new_tokens: {tokens}"
    )


def refuse_unscored(graph: Graph) -> None:
    """PydanticCustomError where no stage or no row can be scored, or stages that sample are scored by nothing."""
    evaluation = graph.evaluation
    if evaluation is None:
        if refused := without_scores(graph):
            raise invalid(f"is missing: {refused}", "evaluation")
        return
    if evaluation.max_new_tokens is None:
        refused = None if evaluation.tasks else without_scores(graph)
        if refused:
            raise invalid(f"is missing: {refused}", "evaluation.max_new_tokens")
        return
    named = (("stages", "stage", graph.stages), ("blends", "blend of prompts", graph.published_prompts))
    for key, what, known in named:
        for name in getattr(evaluation, key) or ():
            refuse_misnamed(f"evaluation.{key}", what, name, known)
    if not any(stage.is_scored for stage in graph.order):
        says = "name the `stages` for transformers to load, or score by `tasks` alone"
        raise invalid(f"only NeMo-RL trains here; {says}", "evaluation")
    if not graph.scored_rows:
        more = "leave max_new_tokens out: held-out rows of written answers give the validation loss by themselves"
        raise invalid(f"no blend of prompts to take held-out rows from; {more}", "evaluation")
    environments = [name for rows in graph.scored_rows for name in rows.blend.environments]
    for name, stage in graph.stages.items():
        for place, criterion in enumerate(stage.gate):
            at = f"stages.{name}.gate.{place}.environment"
            refuse_misnamed(at, "held-out environment", criterion.environment, environments)
    if evaluation.test and not graph.tested_rows:
        names = ", ".join(rows.name for rows in graph.scored_rows)
        raise invalid(f"no blend that is scored has test rows; give one of {names} `test: 200`", "evaluation.test")
    if evaluation.test and not graph.ends:
        raise invalid("the chain ends in variants; say best: held_out_mean beside sweep", "evaluation.test")


def refuse_unmade(graph: Graph, name: str) -> None:
    """PydanticCustomError where nothing makes or judges a generated blend."""
    rows, at = graph.rows(name), f"blends.{name}"
    blend, first = rows.blend, rows.lineage[-1]
    for prompts in first.blend.prompts:
        # a lineage ends where the recipe lacks the blend of the prompts, or has it in the lineage
        refuse_misnamed(f"blends.{first.name}.source.prompts", "blend", prompts, graph.blends)
        circle = " -> ".join([*(each.name for each in rows.lineage), prompts])
        raise invalid(f"the blends take their prompts from each other: {circle}", f"{at}.source.prompts")
    for maker in blend.makers:
        is_judge = maker in blend.rankers
        where = f"{at}.select.rank.by" if is_judge else f"{at}.source.by"
        refuse_misnamed(where, "stage or model", maker, graph.known, graph.names)
        settings = graph[maker].settings
        if settings and settings.answers_prompts == is_judge:
            does = "answers prompts and ranks nothing" if is_judge else "is a reward model, which answers no prompts"
            raise invalid(f"{maker} {does}", where)
    in_jsonl = "its rows have a format of their own; sample from a blend in jsonl"
    first.blend.refuse_images(in_jsonl, f"{at}.source.prompts")
    blend.refuse_too_few(at)
    if not blend.rankers and not first.blend.names_environments:
        says = "no environment rewards responses to its rows; name a reward model in select.rank.by"
        raise invalid(says, f"{at}.source.prompts")
