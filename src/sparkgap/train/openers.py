"""First words of user turns, for targets that write their own.

A small model that continues an empty user turn asks the same few kinds of questions. Openers of many kinds, which it
continues in its own words, spread its conversations over what people use such models for.
"""

import random
import string

_NAMES = (
    "Maria", "Ahmed", "Chloe", "Daniel", "Yuki", "Priya", "Lucas", "Fatima", "Oliver", "Sofia", "Ivan", "Grace", "Noah",
    "Mei", "Samuel", "Elena", "Diego", "Amara", "Peter", "Hana", "Victor", "Ruth", "Omar", "Lily", "Felix", "Nina",
)  # fmt: skip
_THINGS = (
    "apples", "books", "marbles", "tickets", "cookies", "pencils", "stamps", "flowers", "boxes", "chairs", "bottles",
    "coins", "eggs", "shirts", "cards", "toys", "bags of rice", "sandwiches", "balloons", "bricks", "fish", "candles",
)  # fmt: skip
_PLACES = (
    "bakery", "farm", "school", "library", "factory", "shop", "garden", "restaurant", "hospital", "theater", "market",
    "zoo", "gym", "hotel", "museum", "parking lot", "warehouse", "cinema",
)  # fmt: skip
_VERBS = (
    "count", "find", "remove", "sort", "merge", "check", "is", "get", "sum", "reverse", "split", "convert", "filter",
    "max", "group", "parse", "validate", "encode", "compute", "rotate", "unique", "compare",
)  # fmt: skip
_NOUNS = (
    "words", "digits", "vowels", "numbers", "list", "string", "pairs", "primes", "elements", "matrix", "dates",
    "brackets", "palindrome", "duplicates", "characters", "factors", "intervals", "tree", "substring", "values",
)  # fmt: skip
_ARGUMENTS = (
    "n: int", "text: str", "numbers: list[int]", "s", "arr", "items, k", "a, b", "lst", "word", "matrix",
    "values: list[float]", "n", "x: int, y: int", "strings: list[str]", "nums, target",
)  # fmt: skip
_FIELDS = (
    "physics", "history", "cooking", "economics", "biology", "music", "photography", "gardening", "chemistry", "travel",
    "medicine", "astronomy", "law", "sports", "marketing", "programming", "psychology", "education", "climate",
    "literature", "politics", "mathematics", "art", "nutrition", "engineering", "philosophy", "geography", "finance",
)  # fmt: skip
_PEOPLE = (
    "teacher", "doctor", "travel guide", "chef", "lawyer", "software engineer", "historian", "novelist", "scientist",
    "manager", "journalist", "coach", "detective", "parent", "farmer", "pilot", "librarian", "salesperson",
)  # fmt: skip

_OPENERS = {
    "mathematics": (
        "{name} has {number} {things}", "{name} buys {number} {things}", "{name} earns ${number}", "{name} is {number}",
        "{name} and {other} have", "A {place} sells {number} {things}", "A {place} has {number} rows of",
        "There are {number} {things} in a {place}.", "{name} reads {number} pages", "{name} works {small} hours a day",
        "A train travels {number} miles", "A car drives at {number} kilometers per hour",
        "{name} runs {small} miles every", "{name} bakes {number}", "{name} wants to save ${number}",
        "In a class of {number} students,", "A rectangle has a length of {number}",
        "If {small} {things} cost ${number}",
        "What is {number}% of", "Solve for x: {small}x +", "Calculate {number} +", "{name} spends {small} hours",
        "Every day, {name}", "{name} is twice as old as {other}.", "A recipe needs {small} cups",
        "Half of the {things}",
        "The price of {small} {things}", "{name} has {small} times as many {things} as {other}.",
        "Each {place} has {number}", "A box holds {number} {things}.", "How many {things}", "What is the sum of",
        "A tank holds {number} liters", "{name} pays ${number} a month for", "On Monday, {name}", "Find the value of",
        "A shirt costs ${number}", "{name} drives to the {place}", "Solve this problem step by step: {name}",
        "What is the area of", "The average of {small} numbers", "{name} collects {things}.",
    ),
    "code": (
        "Write a Python function that", "Write a Python function `{function}({arguments})` that",
        "Write a function {function} that takes", "Implement a function", "Implement `{function}` in Python",
        "Complete this function:\n```python\ndef {function}({arguments}):\n    \"\"\"",
        "Complete the code:\n```python\nfrom typing import List\n\n\ndef {function}({arguments}) ->",
        "Finish the following Python code.\n```python\ndef {function}({arguments}):\n    \"\"\" ",
        "```python\ndef {function}({arguments}):\n    \"\"\"",
        "Here is a problem; write a solution in Python:\n```python\n\ndef {function}({arguments}):\n    \"\"\"\n    ",
        "def {function}({arguments}):", "Write a program that", "Write a Python program to", "Write a class",
        "Write code to {verb} the {noun}", "How do I {verb} {noun} in Python?", "Given a list of", "Given a string",
        "Given two", "Write a JavaScript function", "Write a SQL query", "Fix the bug in this code:\n```python\ndef",
        "Explain what this code does:\n```python\n", "Write a unit test for", "Write a recursive function",
        "Write a C++ program", "Write a script that", "Write a regular expression", "Create a Python class",
        "What is the time complexity of", "Use a dictionary to", "Write an HTML page",
    ),
    "chat": (
        "Explain", "Explain how", "Explain why", "Explain the difference between", "What is", "What are", "What was",
        "Why do", "Why is", "How does", "How do I", "How can I", "How to", "Who was", "When did", "Where is",
        "Can you explain", "Could you", "Describe", "Describe the", "Compare", "Give me", "Give an example of", "List",
        "List five", "Name three", "Write a short story about", "Write a poem about", "Write an email to",
        "Write a letter", "Write a blog post about", "Write an essay on", "Write a review of",
        "Write a dialogue between",
        "Write a persuasive", "Draft a", "Compose a", "Create a", "Design a", "Develop a plan", "Outline",
        "Summarize the following text:", "Summarize", "Rewrite the following sentence", "Correct the grammar",
        "Translate", "Extract the", "Classify", "Identify the", "Imagine you are a {person}.", "Imagine that",
        "You are a {person}.", "Act as a {person}", "Pretend you are a {person}", "As a {person},", "Suppose",
        "In {field}, what", "Tell me about", "Teach me about {field}", "I need advice on", "I am planning",
        "What would happen if", "What are the main", "What are the advantages of", "Is it", "Should I", "Do you think",
        "Give tips for", "Answer the question:", "Read the passage and", "Convert the following", "Format",
        "Given the following", "Discuss", "Analyze", "Evaluate", "Define", "Suggest", "Provide", "Help me",
        "Let's talk about {field}.", "A question about {field}:",
    ),
}  # fmt: skip

KINDS: tuple[str, ...] = tuple(_OPENERS)
"""Kinds of openers."""


def opener(draw: random.Random) -> str:
    """First words of a user turn: a kind, then an opener of it, with names, numbers and things filled in."""
    pattern = draw.choice(_OPENERS[draw.choice(KINDS)])
    name, other = draw.sample(_NAMES, 2)
    values = {
        "name": name,
        "other": other,
        "number": str(draw.choice((draw.randint(2, 30), draw.randint(10, 120), 10 * draw.randint(1, 60)))),
        "small": str(draw.randint(2, 9)),
        "things": draw.choice(_THINGS),
        "place": draw.choice(_PLACES),
        "verb": draw.choice(_VERBS),
        "noun": draw.choice(_NOUNS),
        "function": f"{draw.choice(_VERBS)}_{draw.choice(_NOUNS)}",
        "arguments": draw.choice(_ARGUMENTS),
        "field": draw.choice(_FIELDS),
        "person": draw.choice(_PEOPLE),
    }
    used = {field for _, field, _, _ in string.Formatter().parse(pattern) if field}
    return pattern.format(**{key: values[key] for key in used})
