"""Whether services that outlive their supervisor are of the fleet of the next one (docs/adr/0056).

Two versions of Tandem may have other options: only those that both have must have one value. An option that one version
lacks must have its default.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from core.config import TandemConfig
from core.config.changes import FIXED

NO_KIN = ""  # the services end with their supervisor


def kinship_of(config: TandemConfig) -> str:
    """As `FleetSpec.kinship`."""
    if not (config.cluster.address and config.cluster.adoption_timeout_s):
        return NO_KIN
    tables, defaults = asdict(config), asdict(TandemConfig())
    return json.dumps(
        {
            f"{table}.{option}": (_hash(tables[table][option]), tables[table][option] == defaults[table][option])
            for table, options in FIXED.items()
            for option in options or tables[table]
        }
    )


def are_kin(ours: str, theirs: str) -> bool:
    try:
        mine, other = json.loads(ours), json.loads(theirs)
        common = mine.keys() & other.keys()
        values_agree = all(mine[name][0] == other[name][0] for name in common)
        return bool(common) and values_agree and all((mine | other)[name][1] for name in mine.keys() ^ other.keys())
    except (ValueError, AttributeError, TypeError, LookupError):  # of a version that writes it otherwise
        return ours == theirs


def _hash(value: object) -> str:
    """Some are secret."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
