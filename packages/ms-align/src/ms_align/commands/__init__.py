"""Commands of `ms-align`; each is a thin wrapper of a public class or function."""
