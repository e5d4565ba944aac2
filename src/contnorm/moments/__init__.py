"""Running moments: freezing, exact re-estimation from data, and training modes."""
