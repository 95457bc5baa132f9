#!/usr/bin/env python3
"""Writes an input for `python -m pdjax.batch` whose rows share long beginnings: questions of customers of a few stores.

    python scripts/make_shared_prefixes.py rows.jsonl                # 500 rows, 20 stores; the same file for the same numbers

Each row is a chat: a system message that all rows share, a price list that the rows of one store share, and then a customer's basket and
question. A prompt is about 260 tokens long, of which the last quarter is its own.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

SYSTEM = (
    "You are the clerk of a chain of small stores. Answer with the price alone, in whole cents. If an item is not on the list, answer: no."
)
GOODS = (
    "apples bread butter candles cheese coffee eggs flour garlic honey jam lamps lemons matches milk mustard nails oats olives onions "
    "oranges paper pears pens pepper plums potatoes rice rope salt soap sugar tea tomatoes twine vinegar walnuts wax wool yeast"
).split()
ITEMS_LISTED, ITEMS_IN_BASKET = 16, 9


def row(number: int, store: int, seed: int) -> dict[str, Any]:
    """The question of customer `number` to `store`."""
    prices = random.Random(f"{seed} {store}")
    goods = prices.sample(GOODS, ITEMS_LISTED)
    lines = [f"- {item}: {prices.randrange(20, 990)} cents" for item in goods]
    customer = random.Random(f"{seed} customer {number}")
    basket = ", ".join(f"{customer.randrange(2, 60)} {item}" for item in customer.sample(GOODS, ITEMS_IN_BASKET))
    question = f"Customer {number} has in the basket {basket}, and asks: what do {customer.choice(GOODS)} cost?"
    text = "\n".join([f"Price list of store {store}:", *lines, question])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {"custom_id": f"store-{store}-customer-{number}", "messages": messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where the rows go, as JSONL")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--stores", type=int, default=20, help="fewer: more rows share each price list")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = [row(number, number % options.stores, options.seed) for number in range(options.rows)]
    random.Random(options.seed).shuffle(rows)
    options.file.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
