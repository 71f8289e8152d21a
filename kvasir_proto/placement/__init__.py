"""Which node holds which experts: the plan, and the function that makes one."""
