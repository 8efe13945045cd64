"""How do other formats come in and go out?"""
