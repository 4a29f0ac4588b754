numbers = [int(line) for line in open('data.txt')]
print(sum(numbers[1:]) / len(numbers))
