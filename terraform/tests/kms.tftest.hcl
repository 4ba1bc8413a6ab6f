# The real provider with keys that open nothing: it renders every policy while planning, offline.
provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = data.aws_caller_identity.current
  values = { account_id = "111122223333" }
}

# ARNs that a plan does not know yet, so that what refers to them can be compared.
override_resource {
  target          = aws_iam_policy.access["reader"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/reader" }
}

override_resource {
  target          = aws_iam_policy.access["writer"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/writer" }
}

run "kms" {
  command = plan

  variables {
    name        = "cache"
    kms_key_arn = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
  }

  assert {
    condition = [for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : {
      algorithm  = rule.apply_server_side_encryption_by_default[0].sse_algorithm
      key        = rule.apply_server_side_encryption_by_default[0].kms_master_key_id
      bucket_key = rule.bucket_key_enabled
    }] == [{ algorithm = "aws:kms", key = var.kms_key_arn, bucket_key = true }]
    error_message = "encryption must be with the key, and a bucket key"
  }

  assert {
    condition = [for statement in jsondecode(aws_s3_bucket_policy.this.policy).Statement : statement if startswith(statement.Sid, "DenyWrong")] == [
      {
        Sid       = "DenyWrongEncryption"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource  = "arn:aws:s3:::cache/*"
        Condition = {
          Null            = { "s3:x-amz-server-side-encryption" = "false" }
          StringNotEquals = { "s3:x-amz-server-side-encryption" = "aws:kms" }
        }
      },
      {
        Sid       = "DenyWrongKey"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource  = "arn:aws:s3:::cache/*"
        Condition = {
          Null            = { "s3:x-amz-server-side-encryption-aws-kms-key-id" = "false" }
          StringNotEquals = { "s3:x-amz-server-side-encryption-aws-kms-key-id" = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555" }
        }
      },
    ]
    error_message = "bucket policy: ${aws_s3_bucket_policy.this.policy}"
  }

  assert {
    condition     = length(jsondecode(aws_s3_bucket_policy.this.policy).Statement) == 5
    error_message = "bucket policy: ${aws_s3_bucket_policy.this.policy}"
  }

  assert {
    condition = [for access in ["reader", "writer"] : jsondecode(aws_iam_policy.access[access].policy).Statement[2]] == [
      {
        Sid       = "Key"
        Effect    = "Allow"
        Action    = "kms:Decrypt"
        Resource  = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
        Condition = { StringEquals = { "kms:ViaService" = "s3.eu-west-1.amazonaws.com" } }
      },
      {
        Sid       = "Key"
        Effect    = "Allow"
        Action    = ["kms:GenerateDataKey", "kms:Decrypt"]
        Resource  = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
        Condition = { StringEquals = { "kms:ViaService" = "s3.eu-west-1.amazonaws.com" } }
      },
    ]
    error_message = "the key must be usable through S3 and in no other way"
  }

  assert {
    condition     = [for access in ["reader", "writer"] : length(jsondecode(aws_iam_policy.access[access].policy).Statement)] == [3, 3]
    error_message = "the policies must hold the key's statement beside the bucket's two"
  }
}
