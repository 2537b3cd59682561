"""The static check of distributed programs: which collectives some ranks may not run. Nothing of a program is imported.

``ddpstats lint PATH...`` is in `lint`. For each file:

1. `program` knows its imports, functions and classes.
2. `collectives` says which calls are collectives, also through functions of the same file.
3. `origins` interprets each function once, and says of an expression whether ranks may differ in it: by their rank, by
   their data, or not; and of a loop whether they may differ in its order.
4. `flow` walks each function and compares what the ranks do on the two sides of such a condition.
5. `lint` has the rules, and takes out what a comment in the program suppresses.

Where it is not certain that ranks can differ, nothing is said: a legal program that is accused costs more than a faulty
one that is missed, which the guard finds when it runs.
"""
