"""Whose cached blocks are: how many each tenant has in each tier, and which tenants claim room there.

    owns      the tenant whose request brought a block first, until it lies in no tier; a hit does not make it another's
    claims    a tenant that owns something, from when its request brings the first block or asks for a prefix until
              so many blocks have come to the tier as lie in it, `turnovers` times
    nobody    owns what requests without a tenant bring, and claims nothing
Time is counted in blocks that come, so that replays know it too. Who owns nothing is forgotten.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

from cluster_core.engine_jobs import TenantShare
from kv_transfer.blocks import Tier


class Owner:
    """A tenant with cached blocks, or nobody."""

    __slots__ = ("blocks", "runs", "tenant_id", "weight")

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.weight = 1.0
        # By tier.
        self.blocks = [0, 0]
        # Of the tree.
        self.runs = 0

    @property
    def share(self) -> TenantShare:
        return TenantShare(self.tenant_id, self.weight)

    def load(self, tier: Tier) -> float:
        """Blocks for its weight: who has most gives up first."""
        return self.blocks[tier] / self.weight


class Owners:
    """See the module. turnovers: 0: all blocks are nobody's."""

    def __init__(self, turnovers: int = 4) -> None:
        self.nobody = Owner("")
        # Called with a tenant that owns nothing any more.
        self.on_gone: Callable[[Owner], None] = lambda owner: None
        self._turnovers = turnovers
        self._by_id: dict[str, Owner] = {}
        # By tier, blocks that have come to it so far.
        self._came = [0, 0]
        # By tier, who claims room, and how many blocks had come when it asked last: who asked last stands last.
        self._asked: tuple[OrderedDict[Owner, int], OrderedDict[Owner, int]] = (OrderedDict(), OrderedDict())

    def __len__(self) -> int:
        """Tenants that own something."""
        return len(self._by_id)

    def __contains__(self, owner: Owner) -> bool:
        return self._by_id.get(owner.tenant_id) is owner

    def of(self, tenant: TenantShare) -> Owner:
        """Who owns what a request of this tenant brings; to be told at once what has `came`."""
        if not tenant.tenant_id or not self._turnovers:
            return self.nobody
        owner = self._by_id.get(tenant.tenant_id)
        if owner is None:
            owner = self._by_id[tenant.tenant_id] = Owner(tenant.tenant_id)
            self.asked(tenant)
        return owner

    def asked(self, tenant: TenantShare) -> Owner | None:
        """A request of this tenant asks for a prefix. None: it owns nothing."""
        owner = self._by_id.get(tenant.tenant_id) if tenant.tenant_id else None
        if owner is not None:
            owner.weight = tenant.weight or 1.0
            for tier, asked in enumerate(self._asked):
                asked[owner] = self._came[tier]
                asked.move_to_end(owner)
        return owner

    def claimants(self, tier: Tier) -> Collection[Owner]:
        """Who claims room; it changes with time."""
        return self._asked[tier].keys()

    def fallen_idle(self, tier: Tier, blocks: int) -> Owner | None:
        """Who claims nothing from now on, for want of asking; None: nobody more. blocks: that lie in the tier."""
        owner, when = next(iter(self._asked[tier].items()), (None, 0))
        if owner is None or self._came[tier] - when < self._turnovers * blocks:
            return None
        del self._asked[tier][owner]
        return owner

    def came(self, owner: Owner, tier: Tier, blocks: int) -> None:
        """To a tier in which they did not lie."""
        owner.blocks[tier] += blocks
        self._came[tier] += blocks

    def left(self, owner: Owner, tier: Tier, blocks: int) -> None:
        owner.blocks[tier] -= blocks
        if owner.blocks == [0, 0] and owner is not self.nobody:
            del self._by_id[owner.tenant_id]
            for asked in self._asked:
                asked.pop(owner, None)
            self.on_gone(owner)

    def check_invariants(self, counted: dict[Owner, list[int]]) -> None:
        """counted: of each owner that has runs, its blocks in either tier and its runs."""
        known = {self.nobody, *self._by_id.values()}
        assert counted.keys() <= known, "blocks of a tenant that is forgotten"
        for owner in known:
            expected = counted.get(owner, [0, 0, 0])
            assert [*owner.blocks, owner.runs] == expected, "blocks of a tenant miscounted"
            assert owner.blocks != [0, 0] or owner is self.nobody, "a tenant without blocks is remembered"
        for asked in self._asked:
            assert asked.keys() <= set(self._by_id.values()), "a tenant that is forgotten claims room"
            assert list(asked.values()) == sorted(asked.values()), "who asked last does not stand last"
