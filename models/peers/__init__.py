"""Other programs that speculate on MLX, for comparisons side by side. Nothing serves with them."""
