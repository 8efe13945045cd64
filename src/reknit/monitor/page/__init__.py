"""Pages for a browser, each one file: style, scripts, and the chart library."""
