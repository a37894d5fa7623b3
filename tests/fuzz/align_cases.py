"""x"""
CASES = ()
