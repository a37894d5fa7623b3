"""What `ms-align` can do; each command is a skin over a public class or function."""
