"""Pipeline schedules as data, and their judge: lists of actions, which need no process."""
