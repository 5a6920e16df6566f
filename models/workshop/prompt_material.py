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
        "Write a solution to this task, and make sure that it is right:\n```python\n\ndef "
        '{function}({arguments}):\n    """\n    You are given',
        "Write a solution to this task, and make sure that it is right:\n```python\n\ndef "
        '{function}({arguments}):\n    """{task_upper}.\n    For example:\n    * {function}(',
        "Solve this and check it with the tests:\n```python\nimport math\n\n\ndef "
        '{function}({arguments}):\n    """\n    Create a function which',
        "Solve this and check it with the tests:\n```python\n\n\ndef helper(x):\n",
        "Solve this and check it with the tests:\n```python\n\ndef {function}({arguments}):\n"
        "    '''\n    Your task is to",
        '```python\ndef {function}({arguments}):\n    """In this task you need to',
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
        "Design a workflow for",
        "You have been asked to plan",
        "I have {n} minutes a day and want to {skill}.",
        "What would be the best approach to",
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
        "Describe the process by which {topic}",
        "Describe the key parts of",
        "How did {topic} influence",
        "Give a brief overview of {topic}, then",
        "What role does {topic} play in",
        "Explain the reasoning behind",
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
        "Compose an engaging {theme}",
        "Draft a professional email to",
        "Write {form} that compares {topic} with",
        "Write {form} of no more than {m} words about",
        "Write a persuasive {topic}",
        "Develop an outline for",
        "Describe {theme} in a way that",
        "Write the opening of a novel about {theme}",
        "Write a dialogue between {role} and {role2} about",
    ),
    "role": (
        "Pretend to be {role}",
        "You are {role}.",
        "Imagine you are",
        "Act as",
        "Answer as {role}:",
        "Let's play a game",
        "Take on the role of {role} and",
        "Now you are {role}. Your task is to",
        "Speak like {role}: what do you think of",
        "You are {role}, and I am",
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
        "Given these categories",
        "Read the paragraph below and count",
        "Evaluate these reviews on a scale of 1 to 5:\n1.",
        "Which word does not belong with the others?",
        "Identify the",
        "Suppose that {name} is taller than {other}, and",
        "Put these facts into a table: {sentence}",
        "Analyze the following",
        "From the text below, find all",
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
        "Write a solution to this task, and make sure that it is right:\n```python\n\ndef "
        '{function}({arguments}):\n    """\n    {task_upper}.\n    It must also work for an empty '
        "input.\n\n    Examples:\n    >>> {function}({k}, {j})\n    {m}\n    >>> {function}({j}, "
        '{k})\n    {n}\n    """\n```',
        "Solve this and check it with the tests:\n```python\n\n\ndef {function2}({arguments}):\n"
        '    """ A helper that {task2}. """\n\n\ndef {function}({arguments}):\n    """ '
        '{task_upper}.\n    Use {function2} where it helps.\n    """\n```',
        "Write a solution to this task, and make sure that it is right:\n```python\n\ndef "
        "{function}({arguments}):\n    '''\n    {name} likes lists of numbers. Write a function "
        "that {task}.\n    If nothing is found, return -1.\n    {function}({k}) == {j}\n    "
        "{function}({m}) == {k}\n    '''\n```",
        "What does this code do, and how can it be improved?\n```python\ndef {function}(values):\n"
        "    result = []\n    for i in range(len(values)):\n        if values[i] % {k} == {j}:\n"
        "            result.append(values[i] + {m})\n    return result\n```",
        "Write a class in Python with a method `{function}` that {task} and a method `{function2}` "
        "that {task2}.",
    ),
    "how": (
        "How do I {skill}?",
        "Give me five tips to {skill}.",
        "Make a weekly plan to {skill}.",
        "I want to {skill}, but I have little time and less than ${n}. What do you suggest?",
        "Design a plan of {k} steps for somebody who wants to {skill}. Give the key "
        "considerations of each step.",
    ),
    "explain": (
        "Explain {topic} in simple terms.",
        "What is {topic}, and why does it matter?",
        "Give three facts about {topic} and explain each.",
        "What is the connection between {topic} and {topic2}?",
        "Compare {topic} with {topic2}.",
        "What are the advantages and disadvantages of {topic}?",
        "Explain what {topic} is and list {k} examples of how it matters in everyday life.",
        "Describe the most important steps in the history of {topic}, and what followed from each.",
        "What would the world be like without {topic}? Discuss work, health and culture.",
    ),
    "write": (
        "Write {form} about {theme}.",
        "Write {form} about {theme} in which {name} meets {other}.",
        "Write {form} that explains {topic}.",
        "Compose {form} about {theme}, and mention {topic} as well as {sentence}",
        "Draft a polite email to {role} that asks about {topic} and {theme}. Keep it short.",
        "Describe {place} on a busy morning, with its sounds, smells and colours.",
        "Write {form} that begins with this sentence: {sentence}",
        'Outline a talk about {topic} with the title "{theme}".',
    ),
    "role": (
        "You are {role}. Tell me about {theme}.",
        "Pretend to be {role} and explain {topic}.",
        "Answer as {role}: how would you {skill}?",
        "You are {role} and meet {role2}. Talk about {topic} and {theme}.",
        "Take on the role of {role}. I ask: what do you think of {topic}? Answer in a few "
        "paragraphs.",
    ),
    "extract": (
        "Summarize in one sentence: {sentence} {sentence2}",
        "Extract all names, numbers and dates from this text as JSON: {sentence} {sentence2}",
        "Translate into {language}: {sentence}",
        "Rewrite more formally: {sentence}",
        "What question does this text answer? {sentence}",
        "{sentence} {sentence2}\nHow many numbers are in this text? List them in order.",
        "Classify each text as good, bad or neutral:\n1. {sentence}\n2. {sentence2}",
        "{name} is older than {other}. {other} is older than Kim. Who is the youngest? Explain "
        "your answer.",
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
    "maths": 0.2,
    "code": 0.34,
    "how": 0.07,
    "explain": 0.13,
    "write": 0.13,
    "role": 0.05,
    "extract": 0.08,
}
