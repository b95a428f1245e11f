"""What happens to the fleet of a world: orders of an operator or a planner, and ends of machines and services."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

FIRST_ORDER_S = 0.4


class OrderKind(Enum):
    """The service or the machine is drawn when the order comes."""

    SWITCH = "order to switch a role"
    SCALE = "order to scale"
    ROLL = "order to roll"
    STOP_ROLL = "order to stop the roll"
    LEAVE = "machine leaves"
    DIE = "worker of the fleet dies"


FREQUENT_KINDS = (OrderKind.SWITCH, OrderKind.SWITCH, OrderKind.SCALE, OrderKind.LEAVE, OrderKind.DIE, OrderKind.DIE)


@dataclass(frozen=True, slots=True)
class Order:
    kind: OrderKind
    at: float


@dataclass(frozen=True, slots=True)
class FleetFaults:
    """Of a world whose services start and end as FleetMachine decides. A service that starts again has another id."""

    orders: tuple[Order, ...]
    drain_timeout_s: float
    failed_start: float  # probability


def draw_fleet_faults(chance: random.Random, last_order_s: float) -> FleetFaults:
    """Every third fleet rolls, at the end of the other orders: a fleet that rolls switches no role."""
    moments = sorted(chance.uniform(FIRST_ORDER_S, last_order_s) for _ in range(chance.choice((4, 8, 16))))
    orders = [Order(chance.choice(FREQUENT_KINDS), at) for at in moments]
    if chance.random() < 0.33:
        orders.append(Order(OrderKind.ROLL, at=moments[-1] - 0.5))
        orders += [Order(OrderKind.STOP_ROLL, moments[-1] + chance.random())] * (chance.random() < 0.5)
    return FleetFaults(tuple(orders), chance.choice((0.4, 1.0, 4.0)), chance.choice((0.0, 0.1)))
