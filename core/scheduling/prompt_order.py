"""The order in which a worker computes prompts.

    priority           -->   tenant              -->   prompt
    lowest value first       shares by rounds          least work left, unless another one falls due

Work is in seconds of the worker. A *share* is the prompts of one tenant with one priority.

**Tenants**: deficit round robin. In a round, each share may use QUANTUM_S of work. Its last chunk of a round may exceed
QUANTUM_S; the next round subtracts the excess. Within a round, the share with the shortest next prompt goes first. A
share that appears during a round joins this round, but at most as many shares join as the round had at its start; later
shares join the next round. So a round of n shares has at most 2 n (QUANTUM_S + a chunk) of work. While two shares both
have prompts, the work that they get differs by at most 2 (QUANTUM_S + a chunk). A tenant without prompts keeps what it
may still use of its round, or its excess: if it returns, it gets no second QUANTUM_S in the same round, and works off
its excess. Rounds add QUANTUM_S, until the order forgets the tenant. If only some prompts can be computed, rounds begin
for their shares alone (`first_of`).

**Prompts**: first come first served, prompt i would be done once its share has served V + B + w: V is the work served
before i arrives, B the work that is left then, and w the work of i. Prompt i is *due* at V + 2 (B + w), so it waits at
most twice as long. The order keeps every due point:

    - A set of prompts is *feasible* if each prompt is done by its due point when they run in the order of due points.
    - An arrival keeps the set feasible: i may run last, and is then done at V + B + w.
    - The prompt with the least work left runs first if the set stays feasible. Else the prompt with the first due point
      runs first. Both keep the set feasible.

The bound holds for work as it was estimated on arrival. It is a bound in work of the share: other tenants and higher
priorities come on top.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import floor

QUANTUM_S = 0.5

_Key = tuple[float, int]  # (seconds, order of arrival): unique


@dataclass(slots=True, eq=False)
class _Prompt:
    name: str
    number: int  # order of arrival
    priority: int
    share: _Share
    left: float  # work
    due: float  # in work served by the share

    @property
    def by_left(self) -> _Key:
        return self.left, self.number

    @property
    def by_due(self) -> _Key:
        return self.due, self.number


@dataclass(slots=True, eq=False)
class _Share:
    tenant: str
    allowance: float  # work that the share may still use in this round
    served: float = 0.0  # work, since the share has prompts
    queued: float = 0.0  # work left
    prompts: dict[int, _Prompt] = field(default_factory=dict)  # by number
    shortest: list[_Key] = field(default_factory=list)  # sorted
    next_due: list[_Key] = field(default_factory=list)  # sorted
    _first: _Prompt | None = None  # known

    def add(self, prompt: _Prompt) -> None:
        self.prompts[prompt.number] = prompt
        insort(self.shortest, prompt.by_left)
        insort(self.next_due, prompt.by_due)
        self.queued += prompt.left
        self._first = None

    def remove(self, prompt: _Prompt) -> None:
        del self.prompts[prompt.number]
        _remove(self.shortest, prompt.by_left)
        _remove(self.next_due, prompt.by_due)
        self.queued -= prompt.left
        self._first = None

    def resize(self, prompt: _Prompt, left: float) -> None:
        _remove(self.shortest, prompt.by_left)
        self.queued += left - prompt.left
        prompt.left = left
        insort(self.shortest, prompt.by_left)
        self._first = None

    def reprice(self, lefts: Mapping[str, float], factor: float) -> None:
        self.served *= factor
        for prompt in self.prompts.values():
            prompt.left, prompt.due = lefts[prompt.name], prompt.due * factor
        self.queued = sum(prompt.left for prompt in self.prompts.values())
        self.shortest = sorted(prompt.by_left for prompt in self.prompts.values())
        self.next_due = sorted(prompt.by_due for prompt in self.prompts.values())
        self._first = None

    def serve(self, prompt: _Prompt, work: float, left: float) -> None:
        first = self._first
        self.resize(prompt, left)
        self.served += work
        self.allowance = max(self.allowance - work, -max(work, QUANTUM_S))
        if first is prompt:
            self._first = first  # its work and the slack of the due points shrink alike

    @property
    def first(self) -> _Prompt:
        """O(number of prompts) after a change, else O(1)."""
        if self._first is None:
            self._first = self._choose()
        return self._first

    def _choose(self) -> _Prompt:
        shortest = self.prompts[self.shortest[0][1]]
        done = self.served + shortest.left
        for due, number in self.next_due:
            if number == shortest.number:
                break
            done += self.prompts[number].left
            if done > due:
                return self.prompts[self.next_due[0][1]]
        return shortest


class _Level:
    """The shares of one priority."""

    def __init__(self) -> None:
        self.shares: dict[str, _Share] = {}  # by tenant
        self._open: list[tuple[float, int, str]] = []  # the next prompts of the shares with an allowance, sorted
        self._keys: dict[str, tuple[float, int, str]] = {}  # the elements of `_open`, by tenant
        self._spare = 0.0  # work that shares may still use which come during this round
        self._left: dict[str, float] = {}  # allowances, below QUANTUM_S, of tenants without prompts

    def share_of(self, tenant: str) -> _Share:
        share = self.shares.get(tenant)
        if share is None:
            share = self.shares[tenant] = _Share(tenant, self._first_allowance(tenant))
        return share

    def _first_allowance(self, tenant: str) -> float:
        """Of a share that appears."""
        if not self.shares:
            self._spare = QUANTUM_S
            return QUANTUM_S
        allowance = self._left.pop(tenant, QUANTUM_S)
        if allowance > self._spare:
            return 0.0
        self._spare -= max(allowance, 0.0)
        return allowance

    def update(self, share: _Share) -> None:
        """Call after every change of a share."""
        key = self._keys.pop(share.tenant, None)
        if key is not None:
            del self._open[bisect_left(self._open, key)]
        if not share.prompts:
            del self.shares[share.tenant]
            self._spare += max(share.allowance, 0.0)
            has_used_some = share.allowance != 0.0 or share.served > 0.0  # else it has waited for the next round
            if share.allowance < QUANTUM_S and has_used_some:
                self._left[share.tenant] = share.allowance
        elif share.allowance > 0.0:
            self._open_share(share)

    def _open_share(self, share: _Share) -> None:
        key = self._keys[share.tenant] = (*share.first.by_left, share.tenant)
        insort(self._open, key)

    def first(self) -> _Prompt:
        if not self._open:
            self._start_round()
        return self.shares[self._open[0][2]].first

    def _start_round(self) -> None:
        self.begin_rounds(self.shares.values())
        self._spare = len(self.shares) * QUANTUM_S

    def begin_rounds(self, shares: Collection[_Share]) -> None:
        """Give these shares, none of which has an allowance, as many rounds as the one with the least debt needs."""
        debt = -max(share.allowance for share in shares)
        added = (floor(debt / QUANTUM_S) + 1) * QUANTUM_S
        for share in shares:
            share.allowance += added
            if share.allowance > 0.0:
                self._open_share(share)
        self._left = {tenant: left + added for tenant, left in self._left.items() if left + added < QUANTUM_S}

    def check(self) -> None:
        assert self.shares, "an empty level is kept"
        assert self._open == sorted(self._keys.values())
        for tenant, share in self.shares.items():
            assert share.prompts, "a tenant without prompts is kept"
            assert tenant not in self._left, "a tenant has two allowances"
            assert (tenant in self._keys) == (share.allowance > 0.0)
            assert self._keys.get(tenant, share.first.by_left)[:2] == share.first.by_left
            assert share.shortest == sorted(prompt.by_left for prompt in share.prompts.values())
            assert share.next_due == sorted(prompt.by_due for prompt in share.prompts.values())
            assert abs(share.queued - sum(prompt.left for prompt in share.prompts.values())) < 1e-6


class PromptOrder:
    """Prompts by name. Every change takes O(log n); the first prompt after a change takes O(n)."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._levels: dict[int, _Level] = {}  # by priority
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, name: str) -> bool:
        return name in self._prompts

    def add(self, name: str, priority: int, tenant: str, work: float, *, is_back: bool = False) -> None:
        """`is_back`: the prompt was served before. Its due point does not count the prompts that wait now."""
        assert name not in self._prompts, f"{name} is in the order already"
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
        share = level.share_of(tenant)
        due = share.served + 2.0 * (work + (0.0 if is_back else share.queued))
        self._num_added += 1
        prompt = self._prompts[name] = _Prompt(name, self._num_added, priority, share, work, due)
        share.add(prompt)
        level.update(share)

    def serve(self, name: str, work: float, left: float) -> None:
        """A step computes `work` of a prompt, and leaves `left`."""
        prompt = self._prompts[name]
        prompt.share.serve(prompt, work, left)
        self._levels[prompt.priority].update(prompt.share)

    def resize(self, name: str, left: float) -> None:
        """Change the work that is left of a prompt, without service."""
        prompt = self._prompts[name]
        if left != prompt.left:
            prompt.share.resize(prompt, left)
            self._levels[prompt.priority].update(prompt.share)

    def reprice(self, lefts: Mapping[str, float]) -> None:
        """Work has other prices: `lefts` has what is left of each prompt, and due points change in proportion."""
        before = sum(prompt.left for prompt in self._prompts.values())
        factor = sum(lefts.values()) / before if before else 1.0
        for level in self._levels.values():
            for share in level.shares.values():
                share.reprice(lefts, factor)
                level.update(share)

    def discard(self, name: str) -> bool:
        """Returns False if the order does not have it."""
        prompt = self._prompts.pop(name, None)
        if prompt is None:
            return False
        prompt.share.remove(prompt)
        level = self._levels[prompt.priority]
        level.update(prompt.share)
        if not level.shares:
            del self._levels[prompt.priority]
        return True

    def work_left(self, name: str) -> float:
        return self._prompts[name].left

    def first(self) -> str | None:
        """The prompt to compute next."""
        return self._levels[min(self._levels)].first().name if self._levels else None

    def first_of(self, names: Iterable[str]) -> str | None:
        """The prompt to compute next if only these can be computed: O(number of names)."""
        prompts = [self._prompts[name] for name in names]
        if not prompts:
            return None
        priority = min(prompt.priority for prompt in prompts)
        shares = {prompt.share.tenant: prompt.share for prompt in prompts if prompt.priority == priority}
        if all(share.allowance <= 0.0 for share in shares.values()):
            self._levels[priority].begin_rounds(shares.values())
        return min(prompts, key=_place).name

    def check(self) -> None:
        for priority, level in self._levels.items():
            level.check()
            assert all(self._prompts[p.name] is p for share in level.shares.values() for p in share.prompts.values())
            assert all(p.priority == priority for share in level.shares.values() for p in share.prompts.values())
        in_shares = [len(share.prompts) for level in self._levels.values() for share in level.shares.values()]
        assert sum(in_shares) == len(self._prompts)


def _place(prompt: _Prompt) -> tuple[int, bool, bool, float, int]:
    share = prompt.share
    return prompt.priority, share.allowance <= 0.0, share.first is not prompt, *prompt.by_left


def _remove(keys: list[_Key], key: _Key) -> None:
    place = bisect_left(keys, key)
    assert keys[place] == key
    del keys[place]
