"""How does a whole state, with its optimizer and its values, go into another format?"""
