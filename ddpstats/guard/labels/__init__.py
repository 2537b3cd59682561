"""The name under which the program reached a tensor: where in the text the value came from.

1. `_source`: the call that a frame is in, as a node of the parsed source.
2. `_bindings`, `_trace`: where that call's argument came from, once per place in the program: routes of keys.
3. `_reading`: keys and containers, read off the running frames without running any code of the program's.
4. `_places`, `_infer`: the routes followed through the frames of one call; an `Inferred` label.
5. `_fate`, `_spelled`, `_evidence`: what the program does with the result, and whether its text has the name.
6. `_judge`: whether two ranks' labels that differ are a fault, a doubt, or each rank's own data.
"""
