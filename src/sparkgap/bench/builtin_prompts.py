"""Prompts that checks and benches use when none are given."""

from collections.abc import Mapping

BUILTIN_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "math": (
        "A baker fills 14 trays with 12 rolls each and sells all but 23 of them. How many rolls were sold? Explain "
        "each step.",
        "A train leaves at 9:40 and arrives at 13:05. Its average speed is 84 kilometres an hour. How far does it go?",
        "Three friends share a bill of 96 euros in the ratio 1 : 2 : 5. What does each of them pay?",
        "What is the remainder when 7 to the power of 20 is divided by 6? Show why.",
        "A rectangle is 5 metres longer than it is wide and has an area of 84 square metres. Find its sides.",
        "A jar holds 4 red and 6 blue marbles. Two are drawn without putting one back. How likely are both blue?",
    ),
    "code": (
        "Write a Python function that returns the longest run of equal items in a list, with a docstring.",
        "Write a SQL query that gives, for each customer, the date and the amount of the latest order.",
        "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n    Complete this function and explain it.",
        "Write a shell script that renames every file in a folder from .jpeg to .jpg and prints what it did.",
        "Explain what a race condition is and fix one in a short Python example with threads.",
        "Write a C function that reverses the words of a string in place.",
    ),
    "chat": (
        "How does a spark plug light the fuel in an engine?",
        "Plan a rainy weekend in a small town for a family with two children.",
        "Summarize the water cycle in five sentences for a ten-year-old.",
        "Write a short letter to a neighbour who plays loud music at night.",
        "What should I look at before I buy a used bicycle?",
        "Tell me about the differences between black tea and green tea.",
    ),
}
"""Texts by category."""

SHORT_BEGINNINGS = (
    "The three primary colours are",
    "Once upon a time there was a",
    "To boil an egg, first",
    "Water freezes at",
)
"""Texts to continue, short because a distribution test reads them thousands of times."""
