"""A chain as one graph: in Graphviz's DOT, in Mermaid, or drawn as SVG."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from scripts.errors import UserError
from scripts.files import write_text
from scripts.report.chain import Chain, Link
from scripts.report.graph import Box, graph_svg
from scripts.report.tree import code_name, datasets_of, image_name, model_name
from scripts.stage.provenance import step_text, words_of_skipped

KINDS = {  # of nodes: the column where they are drawn, and their colour
    "dataset": (0, "#e8e8e8"),
    "blend": (1, "#fff2cc"),
    "model": (1, "#e8e8e8"),
    "checkpoint": (2, "#cfe8f7"),
    "code": (3, "#d9f0e5"),
    "image": (3, "#f9ddcc"),
}
MERMAID_ESCAPES = str.maketrans({"#": "#35;", '"': "#quot;", "<": "#lt;"})


@dataclass(frozen=True)
class Node:
    """One thing of the graph: its kind and the lines that name it."""

    kind: str
    lines: tuple[str, ...]


@dataclass
class Graph:
    """Nodes in the chain's order, each with a short name, and edges from what was used to what came of it."""

    title: str
    nodes: dict[Node, str] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)

    def add(self, node: Node, used_by: str | None = None) -> str:
        """Add a node, once, and an edge from it to the node that used it; its name."""
        name = self.nodes.setdefault(node, f"n{len(self.nodes)}")
        if used_by and (name, used_by) not in self.edges:
            self.edges.append((name, used_by))
        return name


def graph_of(chain: Chain) -> Graph:
    """The graph of a chain."""
    graph, names = Graph(chain.last.name), {}
    for link in chain.links.values():
        names[link.name] = name = graph.add(_checkpoint(link))
        graph.edges += [(names[parent], name) for parent in link.parents]
        if not link.parents:
            graph.add(Node("model", ("model", model_name(link))), name)
        if data := link.record.get("data"):
            blend = graph.add(Node("blend", (f"blend {data['blend']}", f"manifest {data['manifest'][:12]}")), name)
            for dataset in datasets_of(data):
                graph.add(Node("dataset", ("dataset", dataset)), blend)
        for span in link.record.get("trained_by", ()):
            graph.add(Node("code", ("code", code_name(span["code"]))), name)
            if span["image"]:
                graph.add(Node("image", ("image", image_name(span["image"]))), name)
    return graph


def _checkpoint(link: Link) -> Node:
    record = link.record
    seed = [f"seed {record['seed']}"] if record.get("seed") is not None else []
    skipped = [words_of_skipped(record)] if "data_ended" in record else []
    hashes = [f"identity {record['identity']}", f"content {link.content or '-'}"]
    return Node("checkpoint", (f"{link.name}, step {step_text(record)}", *hashes, *seed, *skipped))


def dot_text(graph: Graph) -> str:
    """The graph in DOT."""
    lines = ["digraph lineage {", "  rankdir=LR;", '  node [shape=box, style="rounded,filled", fontname="sans-serif"];']
    for node, name in graph.nodes.items():
        label = json.dumps("\n".join(node.lines), ensure_ascii=False)
        lines.append(f'  {name} [label={label}, fillcolor="{KINDS[node.kind][1]}"];')
    lines += [f"  {start} -> {end};" for start, end in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def mermaid_text(graph: Graph) -> str:
    """The graph in Mermaid's flowchart language."""
    lines = ["flowchart LR"]
    for node, name in graph.nodes.items():
        label = "<br/>".join(line.translate(MERMAID_ESCAPES) for line in node.lines)
        lines.append(f'  {name}["{label}"]:::{node.kind}')
    lines += [f"  {start} --> {end}" for start, end in graph.edges]
    lines += [f"  classDef {kind} fill:{fill},stroke:#555,color:#000" for kind, (_, fill) in KINDS.items()]
    return "\n".join(lines) + "\n"


def svg_text(graph: Graph) -> str:
    """The graph drawn: a column for each kind, and from top to bottom a row of its own for each node in its column."""
    columns = [[node for node in graph.nodes if KINDS[node.kind][0] == column] for column in range(4)]
    rows, boxes = max(map(len, columns)), {}
    for column, nodes in enumerate(columns):
        for place, node in enumerate(nodes):
            row = (place + 0.5) * rows / len(nodes) - 0.5
            boxes[graph.nodes[node]] = Box(column, row, node.lines, KINDS[node.kind][1])
    return graph_svg(f"Lineage of {graph.title}", boxes, graph.edges) + "\n"


WRITERS = {".svg": svg_text, ".dot": dot_text, ".gv": dot_text, ".mmd": mermaid_text, ".mermaid": mermaid_text}


def write_graph(chain: Chain, path: Path) -> None:
    """Write the chain's graph in the format that the file's ending names."""
    if path.suffix not in WRITERS:
        raise UserError(f"{path}: no graph is written as {path.suffix or 'that'}; end it in .svg, .dot or .mmd")
    write_text(path, WRITERS[path.suffix](graph_of(chain)))
