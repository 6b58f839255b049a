"""Other people's trainers; each module needs its own library, and only its users import it."""
