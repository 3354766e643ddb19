"""Linear and logistic regression over columns that several companies hold."""
