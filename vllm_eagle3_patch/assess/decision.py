"""What the user selected, and what was decided, as data."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from vllm_eagle3_patch.assess.assessment import Problem
from vllm_eagle3_patch.assess.model_facts import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_eagle3_patch.transaction.change import Change


class Options(NamedTuple):
    """The options that select what is patched, as the contract names them."""

    unpinned: bool = False
    interface_only: bool = False
    harden: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    force: bool = False

    @property
    def default_set(self) -> bool:
        """Whether the default set of patches is selected, the one that the matrix pins."""
        return not (self.harden or self.only or self.skip)

    def selects(self, name: str) -> bool:
        """Whether ``--only`` and ``--skip`` leave a patch in."""
        return name not in self.skip and (not self.only or name in self.only)

    def allows(self, facts: ModelFacts) -> bool:
        """Whether something can be done for a model: its engine may only be put up with."""
        return facts.reason is None or (self.interface_only and facts.engine)


class Plan(NamedTuple):
    """How apply would end, and what it would write.

    Attributes:
        exit_code: 0 nothing to do, 1 there is, else why it cannot be done.
        state: The installation's state in one word, as in the JSON of ``check``.
        before: The bytes now in each file that would be written.
        problems: Why it cannot be done, if so; where there is nothing to do, what is unproven.
        candidates: The models in question.
    """

    exit_code: int
    state: str
    changes: tuple[Change, ...] = ()
    before: Mapping[str, bytes] = MappingProxyType({})
    problems: tuple[Problem, ...] = ()
    candidates: tuple[str, ...] = ()

    def proven_only(self) -> Plan:
        """For commands that say whether it works: what only looks ready is not."""
        return self._replace(exit_code=1) if self.exit_code == 0 and self.problems else self
