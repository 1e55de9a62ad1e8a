"""The doctor: before any weights load, whether a target and a draft model will work together.

Data flows one way: the checkpoints and the installed source are read, rules reason about what was
read and make findings, the findings make the verdict, and that is rendered.
"""
