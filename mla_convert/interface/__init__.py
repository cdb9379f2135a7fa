"""How the package is asked and how it answers: recipes, flags, tables, pictures, progress, the demo."""
