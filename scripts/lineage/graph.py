"""A chain as one graph: in Graphviz's DOT, in Mermaid, or drawn as SVG."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from scripts.errors import UserError
from scripts.files import write_text
from scripts.lineage.chain import Chain, Link
from scripts.lineage.text import code_name, datasets_of, image_name, model_name
from scripts.stage.provenance import step_text, words_of_skipped

FILLS = {
    "dataset": "#e8e8e8",
    "blend": "#fff2cc",
    "model": "#e8e8e8",
    "checkpoint": "#cfe8f7",
    "code": "#d9f0e5",
    "image": "#f9ddcc",
}
MERMAID_ESCAPES = str.maketrans({"#": "#35;", '"': "#quot;", "<": "#lt;"})


@dataclass(frozen=True)
class Node:
    """One thing of the graph: its kind and the lines that name it."""

    kind: str
    lines: tuple[str, ...]


@dataclass
class Graph:
    """Nodes in the chain's order, and edges from what was used to what came of it."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)

    def join(self, kind: str, lines: tuple[str, ...], to: str) -> str:
        """An edge to a node from one of this kind and these lines, which is there once; its name."""
        name = next((name for name, node in self.nodes.items() if node == Node(kind, lines)), f"n{len(self.nodes)}")
        self.nodes[name] = Node(kind, lines)
        if (name, to) not in self.edges:
            self.edges.append((name, to))
        return name


def graph_of(chain: Chain) -> Graph:
    """The graph of a chain."""
    graph, names = Graph(), {}
    for link in chain.links.values():
        names[link.name] = name = f"n{len(graph.nodes)}"
        graph.nodes[name] = _checkpoint(link)
        graph.edges += [(names[parent], name) for parent in link.parents]
        if not link.parents:
            graph.join("model", ("model", model_name(link)), name)
        if data := link.record.get("data"):
            lines = (f"blend {data['blend']}", f"manifest {data['manifest'][:12]}")
            blend = graph.join("blend", lines, name)
            for dataset in datasets_of(data):
                graph.join("dataset", ("dataset", dataset), blend)
        for span in link.record.get("trained_by", ()):
            graph.join("code", ("code", code_name(span["code"])), name)
            if span["image"]:
                graph.join("image", ("image", image_name(span["image"])), name)
    return graph


def _checkpoint(link: Link) -> Node:
    record = link.record
    seed = [f"seed {record['seed']}"] if record.get("seed") is not None else []
    skipped = [words_of_skipped(record)] if "data_ended" in record else []
    words = [f"identity {record['identity']}", f"content {link.content or '-'}", *seed, *skipped]
    return Node("checkpoint", (f"{link.name}, step {step_text(record)}", *words))


def dot_text(graph: Graph) -> str:
    """The graph in DOT."""
    lines = ["digraph lineage {", "  rankdir=LR;", '  node [shape=box, style="rounded,filled", fontname="sans-serif"];']
    for name, node in graph.nodes.items():
        label = json.dumps("\n".join(node.lines), ensure_ascii=False)
        lines.append(f'  {name} [label={label}, fillcolor="{FILLS[node.kind]}"];')
    lines += [f"  {start} -> {end};" for start, end in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def mermaid_text(graph: Graph) -> str:
    """The graph in Mermaid's flowchart language."""
    lines = ["flowchart LR"]
    for name, node in graph.nodes.items():
        label = "<br/>".join(
            line.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;") for line in node.lines
        )
        lines.append(f'  {name}["{label}"]:::{node.kind}')
    lines += [f"  {start} --> {end}" for start, end in graph.edges]
    lines += [f"  classDef {kind} fill:{fill},stroke:#555,color:#000" for kind, fill in FILLS.items()]
    return "\n".join(lines) + "\n"


def draw(graph: Graph, path: Path) -> None:
    """Draw the graph as SVG: what was used on the left, checkpoints from top to bottom, what trained on the right."""
    import matplotlib.pyplot as plt  # noqa: PLC0415  (a second, which only a picture needs)

    from scripts.report.style import save_figure  # noqa: PLC0415

    places = _places(graph)
    rows = max(y for _, y in places.values()) + 1
    figure, axis = plt.subplots(figsize=(17, 1.25 * rows + 0.6))
    axis.set_xlim(-0.5, 3.5)
    axis.set_ylim(rows - 0.5, -0.5)
    axis.axis("off")
    boxes = {
        name: axis.annotate(
            "\n".join(node.lines),
            places[name],
            ha="center",
            va="center",
            fontsize=8,
            bbox={"boxstyle": "round,pad=0.5", "facecolor": FILLS[node.kind], "edgecolor": "#555555"},
        )
        for name, node in graph.nodes.items()
    }
    for start, end in graph.edges:
        arrow = {"arrowstyle": "-|>", "color": "#555555", "patchA": boxes[start].get_bbox_patch()}
        arrow |= {"patchB": boxes[end].get_bbox_patch(), "shrinkA": 2, "shrinkB": 2}
        axis.annotate("", places[end], xytext=places[start], arrowprops=arrow, zorder=4)  # after the boxes
    save_figure(figure, path)
    plt.close(figure)


def _places(graph: Graph) -> dict[str, tuple[float, float]]:
    """Where each node stands: its kind's column, and from top to bottom a row of its own in the chain's order."""
    columns = {"dataset": 0, "blend": 1, "model": 1, "checkpoint": 2, "code": 3, "image": 3}
    in_columns: dict[int, list[str]] = {column: [] for column in range(4)}
    for name, node in graph.nodes.items():
        in_columns[columns[node.kind]].append(name)
    rows = max(len(names) for names in in_columns.values())
    return {
        name: (column, (place + 0.5) * rows / len(names) - 0.5)
        for column, names in in_columns.items()
        for place, name in enumerate(names)
    }


WRITERS = {".dot": dot_text, ".gv": dot_text, ".mmd": mermaid_text, ".mermaid": mermaid_text}


def write_graph(chain: Chain, path: Path) -> None:
    """Write the chain's graph in the format that the file's ending names."""
    if path.suffix == ".svg":
        draw(graph_of(chain), path)
    elif path.suffix in WRITERS:
        write_text(path, WRITERS[path.suffix](graph_of(chain)))
    else:
        raise UserError(f"{path}: no graph is written as {path.suffix or 'that'}; end it in .svg, .dot or .mmd")
