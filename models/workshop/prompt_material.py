"""Words to begin user turns with, so that a target writes about more than its favourites.

Pure data of this project's own making. A small model that is given only the header of a user
turn hardly ever asks for arithmetic or code. `OPENINGS` are beginnings that the target goes on
with; `QUESTIONS` are whole turns. Braces name lists of `prompt_slots.SLOTS`; `{n}`, `{m}` and
`{k}` are numbers. No sentence is taken from an evaluation set.
"""

from __future__ import annotations

OPENINGS: dict[str, tuple[str, ...]] = {
    "maths": (
        "{name} has {n} {thing}",
        "{name} buys {n} {thing} for ${m} each",
        "{name} and {other} share {n} {thing}",
        "A train travels {n} miles in {k} hours",
        "At {place}, {n} {thing} are sold every day",
        "If a shirt costs ${n} and is reduced by {m}%",
        "How many {thing} does {name}",
        "What is the total cost of",
        "A rectangle is {k} cm wide and",
        "The sum of two numbers is {n}",
        "Solve the equation",
        "Calculate the",
        "Find the value of x",
        "What is {n} times {m}",
        "A tank holds {n} litres of water",
        "{name} earns ${m} an hour",
        "{name} is {k} years older than {other}",
        "There are {n} students in a class",
        "A recipe needs {k} cups of flour",
        "In a bag there are {n} red and {m} blue",
        "Each week {name} reads",
        "What is the probability of",
        "A car uses {k} litres",
        "{name} wants to save ${n}",
        "The average of",
        "Simplify the expression",
        "A farmer has {n} cows and",
        "Half of the {thing} in",
        "It takes {k} workers",
        "{name} walks {k} km to",
        "If {k} {thing} cost ${m}, how much",
        "On Monday, {name} sold {n} {thing}. On Tuesday,",
    ),
    "code": (
        "Write a Python function that",
        "Write a function {function}({arguments}) that",
        "Write a Python program to",
        "Complete the following Python function:\n\ndef {function}({arguments}):\n",
        '```python\ndef {function}({arguments}):\n    """',
        '```python\nfrom typing import List\n\n\ndef {function}({arguments}):\n    """',
        "Write a solution to this problem that passes its tests:\n```python\n\ndef {function}"
        '({arguments}):\n    """',
        "Solve the following problem, and make sure that the tests pass:\n```python\n\ndef "
        '{function}({arguments}):\n    """ ',
        "Write the body of this function:\n```python\nfrom typing import List\n\n\ndef {function}"
        '({arguments}) -> int:\n    """ ',
        "Complete the code.\n```python\n\ndef {function}({arguments}):\n    '''",
        '```python\ndef {function}({arguments}):\n    """\n    Given a list of',
        '```python\ndef {function}({arguments}):\n    """ {task_upper}.\n    >>> {function}(',
        "Fix the bug in this code:\n```python\ndef {function}({arguments}):\n",
        "Write a class in Python",
        "Implement a {function} function in Python",
        "How do I sort a list",
        "How can I read a file in Python",
        "Explain this code:\n```python\n",
        "Write unit tests for",
        "Write a JavaScript function",
        "Write an SQL query that",
        "Write a regular expression",
        "What does this function return?\n```python\ndef {function}({arguments}):\n",
        "Implement an algorithm that",
        "Write a recursive function",
        "Given a list of integers, write",
        "Create a Python script that",
        "Write a solution in Python: given a string",
        "Write a C++ program that",
        "Write a program to find the",
    ),
    "how": (
        "How do I",
        "How can I {skill}",
        "What are the best ways to",
        "Give me tips for",
        "What should I do if",
        "I want to {skill}.",
        "Can you help me",
        "What are the steps to",
        "Make a plan to {skill}",
    ),
    "explain": (
        "Explain {topic}",
        "What is {topic} and",
        "Why is {topic}",
        "What is the difference between",
        "Describe how {topic}",
        "Compare",
        "What are the main causes of",
        "Explain to a child",
        "Who was",
        "When did",
        "What happens when",
        "How does {topic}",
        "Discuss the",
        "What are some examples of",
    ),
    "write": (
        "Write {form} about {theme}",
        "Write {form}",
        "Compose an email to",
        "Draft a",
        "Create a story in which",
        "Write a short paragraph about {topic}",
        "Describe a scene",
        "Continue the story: {name}",
        "Rewrite the following",
        "Come up with a title for",
    ),
    "role": (
        "Pretend to be {role}",
        "You are {role}.",
        "Imagine you are",
        "Act as",
        "Answer as {role}:",
        "Let's play a game",
    ),
    "extract": (
        "Summarize the following text:",
        "Extract all names and dates from:",
        "Translate into {language}:",
        "Classify the following",
        "Read this paragraph and answer",
        "List the key points of",
        "Correct the grammar:",
        "Given the table",
        "Find the odd one out:",
        "Turn this into a list:",
    ),
}

QUESTIONS: dict[str, tuple[str, ...]] = {
    "maths": (
        "{name} has {n} {thing} and gives {k} of them to {other}. Then {name} buys {m} more. "
        "How many {thing} does {name} have now?",
        "A box holds {k} {thing}. How many boxes are needed for {n} {thing}?",
        "{name} works {k} hours a day for {j} days and earns ${m} an hour. How much does {name} "
        "earn?",
        "{place_upper} sells {thing} at ${k} each. On Saturday it sold {n}, on Sunday twice as "
        "many. How much money did it take on both days?",
        "{name} drives {n} km at {m} km an hour. How long does the drive take?",
        "A jacket costs ${n}. It is reduced by {pc}%. What does it cost now?",
        "{name} read {k} pages on Monday, {j} pages more on Tuesday than on Monday, and half of "
        "the total on Wednesday. How many pages did {name} read?",
        "What is {n} + {m} x {k}?",
        "Solve for x: {k}x + {m} = {n}",
        "The sides of a rectangle are {k} m and {m} m. What are its area and its perimeter?",
        "{name} saves ${k} a week. {other} saves ${j} more each week. After {m} weeks, how much "
        "have they saved together?",
        "There are {n} {thing} in {place}. A third of them are red and {k} are green. The others "
        "are blue. How many are blue?",
        "{name} bakes {n} muffins, eats {k} and packs the others in boxes of {j}. How many full "
        "boxes are there, and how many muffins are left?",
        "A water tank loses {k} litres every {j} minutes. How much does it lose in {m} hours?",
        "{name} is {k} years old. {other} is {j} times as old. How old will {other} be in {m} "
        "years?",
        "What is {pc}% of {n}?",
    ),
    "code": (
        "Write a Python function that {task}.",
        "Write a Python function `{function}({arguments})` that {task}. Include a docstring.",
        'Complete this function.\n\n```python\ndef {function}({arguments}):\n    """\n    A '
        'function that {task}.\n    """\n```',
        "Finish the Python code below so that it {task}:\n```python\n\ndef {function}"
        "({arguments}):\n    ''' {task_upper}.\n    '''\n```",
        "Write a solution to this problem that passes its tests:\n```python\n\ndef {function}"
        '({arguments}):\n    """ {task_upper}.\n    """\n```',
        "Solve the following problem, and make sure that the tests pass:\n```python\nfrom typing "
        'import List\n\n\ndef {function}({arguments}):\n    """\n    {task_upper}.\n\n    '
        'Return None if the input is empty.\n    """\n```',
        "Implement the following in Python and explain it: a function that {task}.",
        "I need a short script that {task}. How would you write it?",
        "Write a function in JavaScript that {task}.",
        "Write tests for a Python function that {task}.",
    ),
    "how": ("How do I {skill}?", "Give me five tips to {skill}.", "Make a weekly plan to {skill}."),
    "explain": (
        "Explain {topic} in simple terms.",
        "What is {topic}, and why does it matter?",
        "Give three facts about {topic} and explain each.",
        "What is the connection between {topic} and {topic2}?",
        "Compare {topic} with {topic2}.",
        "What are the advantages and disadvantages of {topic}?",
    ),
    "write": (
        "Write {form} about {theme}.",
        "Write {form} about {theme} in which {name} meets {other}.",
        "Write {form} that explains {topic}.",
    ),
    "role": (
        "You are {role}. Tell me about {theme}.",
        "Pretend to be {role} and explain {topic}.",
        "Answer as {role}: how would you {skill}?",
    ),
    "extract": (
        "Summarize in one sentence: {sentence} {sentence2}",
        "Extract all names, numbers and dates from this text as JSON: {sentence} {sentence2}",
        "Translate into {language}: {sentence}",
        "Rewrite more formally: {sentence}",
        "What question does this text answer? {sentence}",
    ),
}

ENDINGS = (
    "",
    "",
    "",
    "\nThink step by step.",
    "\nShow your reasoning, then give the final answer.",
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
)
"""What may follow a question of arithmetic."""

WEIGHTS = {
    "maths": 0.26,
    "code": 0.34,
    "how": 0.08,
    "explain": 0.12,
    "write": 0.10,
    "role": 0.04,
    "extract": 0.06,
}
