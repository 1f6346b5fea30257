"""What a MoE layer is: its problem, number formats, layouts and sizes, as values without torch."""
