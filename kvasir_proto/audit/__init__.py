"""Whether nodes compute what they say they compute, judged by single rows of their answers.

`sampling` chooses which rows are looked at, `finding` is what was seen of one, `sequential` and `drift` add
up what that says of a node, `verdict` names what follows, `core` keeps all of it. Rows themselves, and who
recomputes them, are the shell's. docs/explanation/audit.md gives the argument.
"""
