"""`sie-stream topology`: what the servers are made of, what lives where, and how full it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.tree import Tree

from sie_stream.cli.fleet import servers
from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, console, show_json
from sie_stream.cli.workers import cluster_state
from sie_stream.edge.connection import Connection
from sie_stream.topology.text import size_text
from sie_stream.topology.tree import NodeKind, TreeNode, topology_tree

BAR_CELLS = 10
FULL_PERCENT = 85
OVER_PERCENT = 100
STYLES: dict[NodeKind, str] = {
    "server": "bold",
    "numa": "cyan",
    "island": "magenta",
    "device": "bold",
    "resident": "default",
}


def topology(bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Draw the servers of the cluster: sockets, NUMA nodes, NVLink islands, devices, and the models on them.

    \b
    Examples:
      sie-stream topology
      sie-stream topology -o json
    """
    nodes = topology_tree(servers(cluster_state(Connection.open(bootstrap_servers))))
    if output is OutputFormat.JSON:
        show_json(as_json(nodes))
    elif nodes:
        console.print(render(nodes))
    else:
        console.print("no worker is live")


def render(nodes: Sequence[TreeNode]) -> Tree:
    """The servers as one Rich tree, with a bar of how full each level is. Print it on any console."""
    root = Tree("cluster", hide_root=True, guide_style="dim")
    for node in nodes:
        _add(root, node)
    return root


def as_json(nodes: Sequence[TreeNode]) -> list[Any]:
    """The same tree as dictionaries and lists, with `percent` beside the bytes."""
    return [
        {
            "kind": node.kind,
            "name": node.name,
            "detail": node.detail,
            "memory_bytes": node.memory_bytes,
            "used_bytes": node.used_bytes,
            "percent": node.percent,
            "children": as_json(node.children),
        }
        for node in nodes
    ]


def _add(parent: Tree, node: TreeNode) -> None:
    branch = parent.add(_label(node))
    for child in node.children:
        _add(branch, child)


def _label(node: TreeNode) -> str:
    parts = [f"[{STYLES[node.kind]}]{escape(node.name)}[/]"]
    if node.detail:
        parts.append(f"[dim]{escape(node.detail)}[/]")
    if node.kind == "resident":
        parts.append(size_text(node.used_bytes))
    elif node.memory_bytes:
        parts.append(f"{bar(node.percent)} {size_text(node.used_bytes)} of {size_text(node.memory_bytes)}")
    elif node.used_bytes:
        parts.append(f"{size_text(node.used_bytes)} used, size not known")
    return "  ".join(parts)


def bar(percent: int) -> str:
    """Ten cells and the number; any use at all fills one cell. Yellow from 85 %, red above 100 %."""
    filled = min(BAR_CELLS, -(-percent * BAR_CELLS // 100))
    style = "red" if percent > OVER_PERCENT else "yellow" if percent >= FULL_PERCENT else "green"
    return f"[{style}]{'█' * filled}[/][dim]{'░' * (BAR_CELLS - filled)}[/] {percent:3d} %"
