"""Starts things: the command line, the local simulation over emulated WAN links, the live view and the report.

In the order of the flow: `config_file` reads and checks one TOML a process, `models` finds or converts the model,
`wan` emulates a region's link, `processes` starts, watches and ends children, `simulate` runs a whole fleet on one
machine, `trace` records its versions, `progress` turns everybody's events into one state, `live` and `report` draw
it, `inspection` explains what a store holds, and `cli` is the command.
"""
