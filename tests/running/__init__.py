"""How the tests themselves are run: side by side, within budgets, with random examples to suit."""
