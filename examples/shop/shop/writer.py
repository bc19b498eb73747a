"""Customers who go on buying until the shop refuses: python -m shop.writer [ORDERS]

Each order that was acknowledged is a line of orders.log, so that none can be lost unnoticed.
"""

import random
import sys
import time
from itertools import count
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from shop.orders import find_user, place_order, sign_up


def main() -> None:
    """Place an order every 20 ms, as many as are wanted; each tenth is of a new customer."""
    placed = 0
    with Path("orders.log").open("a", encoding="utf-8", buffering=1) as log:
        for turn in range(int(sys.argv[1])) if sys.argv[1:] else count():
            try:
                log.write(f"{buy(turn)}\n")
            except DBAPIError as error:
                print(f"{placed} orders placed, then: {str(error.orig).splitlines()[0]}")
                return
            placed += 1
            time.sleep(0.02)
    print(f"{placed} orders placed")


def buy(turn: int) -> int:
    """Return the ID of an order, by a new customer or by one who logs in."""
    number = random.randint(1, 5000)  # noqa: S311 -- no secret
    user = find_user(f"user{number}@example.org") if turn % 10 else None
    user = user or sign_up(f"{time.time_ns()}@example.net", "DE", "New Street 1")
    return place_order(user, {1 + turn % 40: 1, 1 + (turn + 7) % 40: 2})


if __name__ == "__main__":
    main()
